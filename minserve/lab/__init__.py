"""What notebooks and the command line show: figures, widgets, cell helpers, claims. Nothing in the engine imports it."""
