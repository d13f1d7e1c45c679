"""What a chat template raises when it refuses messages, or when they lack what it writes.

Importing this requires jinja2, which comes with transformers.
"""

from jinja2 import TemplateError

TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError)
