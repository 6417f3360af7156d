"""Every error the library raises on purpose. A message says what, what was got, what was expected, what to do."""


class Exl2Error(Exception):
    """Root of all exl2nb errors."""


class FormatError(Exl2Error, ValueError):
    """A model file violates its format. Names file, tensor, what was found and what was expected."""


class ConfigError(Exl2Error, ValueError):
    """A config.json, tokenizer or generation config holds a value that cannot be used."""


class ModelNotFound(Exl2Error, FileNotFoundError):
    """A path or hub id does not lead to a model directory."""


class UnknownArchitecture(Exl2Error, ValueError):
    """`architectures` names a class that has no entry in the architecture table."""


class TokenizerError(Exl2Error, ValueError):
    """The tokenizer is missing or does not fit the model."""


class OptionError(Exl2Error, TypeError, ValueError):
    """An unknown keyword or a value out of range. Names the nearest known keyword."""


class ContextOverflow(Exl2Error, ValueError):
    """A request does not fit the context or the cache that was allocated."""


class OutOfPages(Exl2Error, MemoryError):
    """The page table has too few free pages."""


class EngineClosed(Exl2Error, RuntimeError):
    """The engine was closed; load the model again."""


class GenerationError(Exl2Error, RuntimeError):
    """A step failed while a request was running; the cause is chained."""


class ConversionError(Exl2Error, RuntimeError):
    """A conversion cannot go on, or its saved state does not fit the request."""


class DeviceError(Exl2Error, RuntimeError):
    """A requested device or compiled library cannot be used here."""


class OutOfMemory(DeviceError, MemoryError):
    """The device has too little memory: says what was needed and what is free. Nothing else has changed."""


class Interrupted(Exl2Error, RuntimeError):
    """Work was cancelled by `cancel()` (KeyboardInterrupt stays KeyboardInterrupt)."""


class StructureError(Exl2Error, ValueError):
    """A schema, regex or grammar cannot be used, or an answer does not have the structure that was asked for."""


class CalibrationWarning(UserWarning):
    """The calibration text seems wrong for the model; the conversion continues."""


class PictureError(Exl2Error, ValueError):
    """A picture or video cannot be read, is too large, or is given to a model that sees none."""


class MissingDependency(Exl2Error, ImportError):
    """An optional package is needed and not installed; names it and the extra that brings it."""
