"""The record of a run: schema, reader and writer, provenance, and its row in a table."""
