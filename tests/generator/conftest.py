import pytest

from . import fakes


@pytest.fixture
def running():
    """Makes engines on fake models; after the test each comes to rest, has all its pages free and closes."""
    made = []

    def make(model=None, **options):
        made.append(fakes.engine(model, **options))
        return made[-1]

    yield make
    for engine in made:
        if getattr(engine.model, "gate", None) is not None:
            engine.model.gate.set()
        assert engine.closed or engine.wait_idle(10)
        assert engine.pages.num_free == engine.pages.num_pages
        engine.close()
