"""Build networks, data and scenarios for images."""
