"""The plug-in for stock torchrun: ``torchrun --rdzv-backend=elastic``."""
