"""The quickstart: a task with answers that can be checked, a small model made for it on the spot, and a report."""
