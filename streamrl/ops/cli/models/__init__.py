"""Commands about models: evaluate, chat, serve, and the published weights."""
