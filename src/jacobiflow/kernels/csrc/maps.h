/* Elementwise maps: their codes, their names, and how many numbers each takes besides theta. Python reads the names
 * and counts from jf_codes. Splines: slopes by softplus, or by exp, all soft-clipped. */
#ifndef JACOBIFLOW_MAPS_H
#define JACOBIFLOW_MAPS_H

#define MAPS(M)               \
    M(EXP, "exp", 0)          \
    M(SOFTPLUS, "softplus", 1) \
    M(SIGMOID, "sigmoid", 1)  \
    M(SOFTCLIP, "softclip", 1) \
    M(CLAMPED, "clamped", 2)  \
    M(STABLE, "stable", 1)    \
    M(SPLINE, "spline", 5)    \
    M(CLIPPED_SPLINE, "clipped_spline", 4) \
    M(SHIFT, "shift", 0)

#define MAP_CODE(CODE, NAME, COUNT) CODE,
#define MAP_NAME(CODE, NAME, COUNT) NAME ":" #COUNT " "

enum { MAPS(MAP_CODE) };

#endif
