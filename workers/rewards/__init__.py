"""Rewards: the sources that give numbers to samples: functions, programs, judges, services, a teacher."""
