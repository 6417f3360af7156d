"""An evaluation by inspect-ai against a server whose URL is the argument; raises at the first fault. Runs in an environment of its own."""

import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

if __name__ == "__main__":
    samples = [Sample(input="It was", target=sys.argv[2]), Sample(input="The old man", target="no such text")]
    options = {"max_tokens": 30, "temperature": 0.0, "log_dir": tempfile.mkdtemp(), "display": "none"}
    model = {"model": "openai-api/exl2nb/demo_model", "model_base_url": sys.argv[1] + "/v1", "model_args": {"api_key": "none"}}
    (log,) = eval(Task(dataset=samples, solver=[generate()], scorer=includes()), **model, **options)
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 0.5, log.results
    assert log.stats.model_usage["openai-api/exl2nb/demo_model"].output_tokens <= 60
    sys.stdout.write("fine\n")
