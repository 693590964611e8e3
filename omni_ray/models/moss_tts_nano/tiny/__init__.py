"""Python code that the tiny checkpoint carries beside its weights; see ``checkpoint.make_tiny``."""
