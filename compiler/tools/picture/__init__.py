"""Pictures of schedules as SVG, HTML, terminal text and Chrome trace, from one set of values and one geometry.

`panel.panel_of(schedule, costs)` returns the values of one schedule, a `drawing.Picture` holds one or several panels,
and `formats.FORMATS` has the functions that draw it.
"""
