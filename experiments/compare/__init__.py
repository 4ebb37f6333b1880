"""Every mechanism at its own learning rate, on problems that tell mechanisms apart: see README.md."""
