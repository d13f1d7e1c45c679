"""Every error that streamrl raises on purpose.

StreamrlError
├── UserError            the user can fix it: one clear line, exit code 2
│   ├── ConfigError      a setting is unknown, of the wrong type, or contradicts another
│   ├── DataError        a data set, model folder or tokenizer is invalid
│   └── ResourceError    something that the run needs is missing: Redis, a port, vLLM, disk
│       └── OtherSchema  the run's learner writes messages that this version cannot read
├── WireError            a message that does not follow the schema or exceeds a limit
├── TransportError       Redis, or the weight store, did not answer within its bounds
│   ├── Fenced           a newer learner term exists; this process must stop at once
│   │   └── Replaced     another learner has taken over the run; this one must not restart
│   ├── Refused          another learner holds the run
│   ├── Ended            an operator has ended the run since this learner started
│   ├── RunGone          the run was removed and left a tombstone: exit
│   └── ServerFull       Redis accepts no writes until there is room (maxmemory, its disk); nothing was written
├── WeightsError         a blob, manifest, or digest is missing or wrong
│   └── LoadRejected     the engine did not prove that it serves what was loaded
├── EngineError          the generation engine died or makes no progress
├── SampleError          the engine refused one sample, and goes on
├── RewardError          a sample could not be scored; never a number
│   └── RewardOutage     nothing can be scored now, which is not the sample's fault
├── PartError            a part started by the launcher ended, and restarting it would not help
└── TrainingError        training cannot go on: non-finite steps in a row, for example
    └── NotPublished     no weights could be published for too long; what was trained is sound
"""

from __future__ import annotations


class StreamrlError(Exception):
    """Base of every deliberate error; its message says what happened and what to do."""

    exit_code = 1


class UserError(StreamrlError):
    exit_code = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class ResourceError(UserError):
    pass


class OtherSchema(ResourceError):
    pass


class WireError(StreamrlError):
    pass


class TransportError(StreamrlError):
    pass


class Fenced(TransportError):
    pass


class Replaced(Fenced):
    exit_code = UserError.exit_code  # like other errors that a restart does not fix


class Refused(TransportError):
    exit_code = UserError.exit_code


class Ended(TransportError):
    exit_code = 0  # it ended as requested


class RunGone(TransportError):
    pass


class ServerFull(TransportError):
    pass


class WeightsError(StreamrlError):
    pass


class LoadRejected(WeightsError):
    pass


class EngineError(StreamrlError):
    pass


class SampleError(StreamrlError):
    pass


class RewardError(StreamrlError):
    pass


class RewardOutage(RewardError):
    pass


class PartError(StreamrlError):
    pass


class TrainingError(StreamrlError):
    pass


class NotPublished(TrainingError):
    pass
