"""The dashboard: one static page and its data, all read-only.

GET /                    the page; it contains no data, so it needs no token
GET /api/view            the View, workers' idle time by cause and their versions, since the server started
GET /api/history         the curves of `monitor.charts`, thinned
GET /api/rollouts[/ID]   the last groups; a single one as `streamrl groups show --json` prints it
GET /metrics             for Prometheus
"""
