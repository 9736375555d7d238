"""Media items: processing one, its header, the layout of its placeholders, options, what is learned at start."""
