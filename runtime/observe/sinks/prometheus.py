"""The Prometheus endpoint of a run: http://127.0.0.1:PORT/metrics, with the series of
runtime/observe/watch/series.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runtime.observe.sinks.sink import Point, SinkContext
from runtime.observe.watch.series import SERIES


class Prometheus:
    """Serves the series of the last row for Prometheus to scrape."""

    def __init__(self) -> None:
        self.destination = ""
        self.key: str | None = None
        self._families: list[Any] = []  # replaced as a whole, so that a scrape sees a single row
        self._server: Any = None

    def open(self, opened: SinkContext) -> None:
        """Start the server. OSError that names the port if it cannot be used."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._opened = opened
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self.send(())
        port, listen = opened.metrics.prometheus, opened.metrics.listen
        assert port is not None
        try:
            self._server, _ = start_http_server(port, listen, registry)
        except OSError as error:
            raise OSError(
                error.errno, f"port {port} of {listen}: {error.strerror}; name another in `metrics`"
            ) from None
        host = f"[{listen}]" if ":" in listen else listen
        self.destination = f"http://{host}:{self._server.server_port}/metrics"

    def collect(self) -> Iterable[Any]:
        """Return the families, for prometheus_client."""
        return self._families

    def send(self, points: Sequence[Point]) -> None:
        """Rebuild the families from the current state."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: list[Any] = []
        for series in SERIES:
            kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
            family = kind(series.name, series.help, labels=("run", *series.labels))
            for labels, value in series.read(self._opened.state):
                family.add_metric((self._opened.name, *labels), value)
            families.append(family)
        self._families = families

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
