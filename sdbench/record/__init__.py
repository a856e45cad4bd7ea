"""The record of a run: its schema, its reader and writer, provenance, and its row in a table."""
