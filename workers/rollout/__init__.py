"""Rollouts: tickets are leased, answered with generated and scored samples, and delivered as groups."""
