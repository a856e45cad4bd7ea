"""Drawing pictures with a model."""
