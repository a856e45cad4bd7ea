"""Procedural pictures of coloured shapes with captions: generation and judgement."""
