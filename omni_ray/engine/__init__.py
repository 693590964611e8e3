"""HOW ONE STAGE COMPUTES: engines and their contract. No ray, no fastapi."""
