"""OpenTelemetry: a span for each step and each save, over OTLP. Each start of the run is one trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.observe.sinks.sink import Point, SinkContext
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import seconds_of

NS = 1_000_000_000
TIMEOUT_S = 10


class OpenTelemetry:
    """Sends spans to an OTLP endpoint over HTTP; needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http."""

    def __init__(self) -> None:
        self.destination = ""
        self.key: str | None = None

    def open(self, opened: SinkContext) -> None:
        """Create the tracer, without sending anything."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

        class KeptSpans(SpanExporter):
            """Keeps ended spans, so that `send` learns whether they were exported."""

            def __init__(self) -> None:
                self.spans: list[Any] = []

            def export(self, spans: Sequence[Any]) -> Any:
                self.spans = [*self.spans, *spans]
                return SpanExportResult.SUCCESS

        endpoint = str(opened.metrics.otel).rstrip("/")
        self.destination = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint}/v1/traces"
        self._spans, self._success = KeptSpans(), SpanExportResult.SUCCESS
        provider = TracerProvider(resource=Resource.create({"service.name": "dsc", "dsc.run": opened.name}))
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._trace: Any = trace
        self._tracer: Any = provider.get_tracer("dsc")
        self._exporter: Any = OTLPSpanExporter(endpoint=self.destination, timeout=TIMEOUT_S)
        self._parent: Any = None

    def send(self, points: Sequence[Point]) -> None:
        """Send the spans of steps and saves. OSError if that fails."""
        if not self._spans.spans:  # else they belong to the same points, whose export failed before
            for item, values in points:
                self._take(item, values)
        if self._spans.spans and self._exporter.export(self._spans.spans) is not self._success:
            raise OSError(f"{self.destination} does not take spans")
        self._spans.spans = []

    def _take(self, item: FollowedItem, values: Mapping[str, float]) -> None:
        end_s = seconds_of(item.time)
        if end_s is None:
            return
        if item.kind == "row":
            named = {f"dsc.{name.replace('/', '.')}": n for name, n in values.items() if math.isfinite(n)}
            self._span(f"step {item.step}", end_s - values.get("step_s", 0.0), end_s, {"dsc.step": item.step, **named})
        elif item.fields.get("event") == "start":
            self._begin(item.fields)
        elif item.fields.get("event") == "save":
            facts = {name: item.fields[name] for name in ("step", "bytes", "checkpoint") if name in item.fields}
            seconds = item.fields.get("written_s", 0.0)
            self._span("save", end_s - seconds, end_s, {f"dsc.{name}": value for name, value in facts.items()})

    def _begin(self, start: Mapping[str, Any]) -> None:
        """Create the root span of a start. It has no length, because a killed process cannot end a span."""
        time_ns = round((seconds_of(start.get("time")) or 0.0) * NS)
        if not time_ns:
            return
        facts = {f"dsc.{name}": start[name] for name in ("ranks", "device", "build", "step") if name in start}
        root = self._tracer.start_span("start", start_time=time_ns, attributes=facts, context=self._trace.Context())
        root.end(end_time=time_ns)
        self._parent = self._trace.set_span_in_context(root)

    def _span(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(name, self._parent, start_time=round(start_s * NS), attributes=attributes)
        span.end(end_time=round(end_s * NS))

    def close(self) -> None:
        self._exporter.shutdown()
