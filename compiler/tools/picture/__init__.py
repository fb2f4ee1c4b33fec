"""Pictures of schedules: one set of values and one geometry, drawn as SVG, HTML, terminal text and Chrome trace.

`panel_of(schedule, costs)` makes the values of one schedule, a `Picture` holds one or several of them, and
`formats.FORMATS` has what draws it.
"""

from compiler.tools.picture.drawing import BoxRow, DrawnAction, DrawnExchange, DrawnMessage, Panel, Picture, StepCell
from compiler.tools.picture.panel import panel_of

__all__ = ["BoxRow", "DrawnAction", "DrawnExchange", "DrawnMessage", "Panel", "Picture", "StepCell", "panel_of"]
