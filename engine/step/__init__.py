"""One step: its plan, its rows, its passes on the device, its result and its time."""
