"""The sparse posteriors, one folder each: formulas, parameters and guide side by side."""
