"""How fast does a machine train Stable Diffusion, and what limits it?"""
