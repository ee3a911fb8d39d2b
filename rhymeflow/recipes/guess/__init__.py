"""The recipe `guess`: find a number by hints; its checkpoint."""
