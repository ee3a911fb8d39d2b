"""The recipe `tools`: sums of long numbers, with a calculator; its checkpoint."""
