"""What measures: training steps, a data source alone, the operators of a step."""
