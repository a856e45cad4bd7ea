"""How fast does a machine train Stable Diffusion, and what limits it?"""

__version__ = "0.1.0"
