"""Fills in the templates of multi-node/ and checks what comes out."""
