"""Media items: processing one, its header, the layout of its placeholders, options, what is found out at start."""
