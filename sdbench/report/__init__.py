"""Tables, plots and pages from records and figures. Needs no torch."""
