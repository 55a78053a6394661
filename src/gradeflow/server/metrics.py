"""What a server tells Prometheus of the versions that it serves, beside what vLLM tells of itself."""

from prometheus_client import Counter, Gauge, Histogram

from gradeflow.server.catalogue import Served

OF = ("model", "version", "adapter")
REQUESTS = Counter("gradeflow_requests", "Requests by the version that answered and HTTP status", (*OF, "status"))
SECONDS = Histogram("gradeflow_request_seconds", "Seconds from a request to the end of its reply", OF)
RUNNING = Gauge("gradeflow_running_requests", "Requests that are being answered")
SERVED = Gauge("gradeflow_served", "1 for the version that a name leads to", ("name", *OF))
SWITCHES = Counter("gradeflow_switches", "How often a name was led to another version", ("name",))
REFUSED = Counter("gradeflow_refusals", "How often a version that a name leads to was refused", ("name", "version"))


def answered(served: Served, status: int, seconds: float) -> None:
    labels = of(served)
    REQUESTS.labels(*labels, str(status)).inc()
    SECONDS.labels(*labels).observe(seconds)


def of(served: Served) -> tuple[str, str, str]:
    return served.version.name, str(served.version.version), served.version.digest[:12]


def switched(name: str, before: Served | None, now: Served) -> None:
    if before:
        SERVED.remove(name, *of(before))
        SWITCHES.labels(name).inc()
    SERVED.labels(name, *of(now)).set(1)


def refused(name: str, version: str) -> None:
    REFUSED.labels(name, version).inc()
