"""The paper: its tables recomputed beside the printed values, its lemmas as functions, its simulation of branches."""
