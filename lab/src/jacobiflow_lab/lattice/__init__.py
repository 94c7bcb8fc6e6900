"""Flows of fields on a lattice, and the Ising model that they sample."""
