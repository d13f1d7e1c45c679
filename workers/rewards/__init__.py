"""Rewards: the sources that score samples: functions, programs, judges, services, a teacher."""
