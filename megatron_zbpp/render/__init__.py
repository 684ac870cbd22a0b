"""Draws timelines: text, SVG, HTML, PNG, Perfetto."""
