"""Every error that a page or the command line may show to the user as it stands.

The message is one or two sentences: what happened, with the value; then what to do.
Anything that is not a `MnistTrainerError` is a bug and keeps its traceback in the log.
"""


class MnistTrainerError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigError(MnistTrainerError, ValueError):
    """A setting is outside what can be trained."""


class DataError(MnistTrainerError):
    """MNIST cannot be read, unpacked or fetched."""


class DeviceUnavailableError(MnistTrainerError):
    """A device was asked for by name and cannot be used."""


class GroupError(MnistTrainerError):
    """The processes that should train a run together do not find each other."""


class ProcessLostError(GroupError):
    """One of the processes that train a run together has died, or cannot be reached."""


class RunNotFoundError(MnistTrainerError, LookupError):
    """No run has this id."""


class RunBusyError(MnistTrainerError):
    """A run is in other hands, or too many wait already."""


class RaceError(MnistTrainerError):
    """A race has come to no result."""


class RunFolderError(MnistTrainerError):
    """A run's folder, or a file in it, cannot be read or written."""


class ArchiveError(RunFolderError):
    """A zip cannot be imported as a run."""


class ImageError(MnistTrainerError):
    """A picture cannot be read as a drawing."""


class BlankDrawingError(ImageError):
    """A picture has no ink."""
