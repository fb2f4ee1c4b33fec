"""Pictures of schedules as SVG, HTML, terminal text and Chrome trace, from one set of values and one geometry.

`panel_of(schedule, costs)` returns the values of one schedule, a `Picture` holds one or several panels, and
`formats.FORMATS` has the functions that draw it.
"""

from compiler.tools.picture.drawing import BoxRow, DrawnAction, DrawnExchange, DrawnMessage, Panel, Picture, StepCell
from compiler.tools.picture.panel import panel_of

__all__ = ["BoxRow", "DrawnAction", "DrawnExchange", "DrawnMessage", "Panel", "Picture", "StepCell", "panel_of"]
