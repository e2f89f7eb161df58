"""What a device call can come to, by what the caller does next.

DeviceError
├── DeviceMissingError   there is no such device here, or its driver cannot do this
├── DeviceBusyError      not in time, and nothing has changed: unlock the others, give up
├── DeviceRefusedError   the call has no place in the process's state: a mistake, nothing changed
├── DeviceGoneError      the process has ended
└── DeviceLostError      what the process had on the device is lost: end it
    ├── DeviceFullError      for want of device memory
    └── DeviceSilentError    the driver did not come back in time: as good as lost
"""

from nagara.snapshot.errors import SnapshotError


class DeviceError(SnapshotError):
    """Root of the device's errors."""


class DeviceMissingError(DeviceError):
    """No usable device, or one whose driver cannot save and restore."""


class DeviceBusyError(DeviceError):
    """A lock was not had in time; the process goes on as it was."""


class DeviceRefusedError(DeviceError):
    """The process is not in a state in which this can be asked."""


class DeviceGoneError(DeviceError):
    """The process has ended."""


class DeviceLostError(DeviceError):
    """The process cannot use the device any more and must be ended."""


class DeviceFullError(DeviceLostError):
    """There was not enough memory on the device."""


class DeviceSilentError(DeviceLostError):
    """The driver did not answer in time."""
