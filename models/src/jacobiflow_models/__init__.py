"""The bundled checkpoints of jacobiflow: one folder per model."""
