"""The dashboard: one static page and what it asks for, all of it read-only.

GET /                    the page; holds no data, so it needs no token
GET /api/view            the View, workers' idle by cause and their versions, as seen since the server began
GET /api/history         the curves of `monitor.charts`, thinned
GET /api/rollouts[/ID]   the last groups; one of them, as `streamrl groups show --json` prints it
GET /metrics             for Prometheus
"""
