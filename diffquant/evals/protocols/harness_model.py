"""Our scoring as a model of lm-eval. Import only where lm-eval is installed."""

from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffquant.errors import UsageError
from diffquant.evals.encoding import Request, RequestEncoder
from diffquant.evals.language_model import LanguageModel
from diffquant.evals.scoring import score
from diffquant.support.progress import Progress
from diffquant.text.tokens import end_token

_MAX_GENERATED = 256


class HarnessModel(LM):
    """A model of lm-eval, which answers its requests with the numbers that lm-eval's HFLM gives.

    Args:
        model: model that the requests are answered with.
        batch_tokens: most tokens of one scoring pass.
    """

    def __init__(self, model: LanguageModel, batch_tokens: int, progress: Progress) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.batch_tokens = batch_tokens
        self.progress = progress
        self.encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary)
        self._device = model.device

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each (context, continuation)."""
        encoded = self.encoder.requests(request.args for request in requests)
        answers = [(s.logprob, s.greedy) for s in score(self.model, encoded, self.batch_tokens, self.progress)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-probability of each (text,), every token predicted once with the most context that fits."""
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(score(self.model, [w for of_text in windows for w in of_text], self.batch_tokens, self.progress))
        totals = [sum(next(scores).logprob for _ in of_text) for of_text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The continuation of each (context, generation arguments), cut at its first stop sequence."""
        answers = []
        for done, request in enumerate(requests, 1):
            context, arguments = request.args
            answers.append(self._generate(context, dict(arguments)))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
            self.progress(done, len(requests), "generating")
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def _windows(self, text: str) -> list[Request]:
        windows = get_rolling_token_windows(
            token_list=self.encoder.encode(text),
            prefix_token=self.encoder.prefix_token,
            max_seq_len=self.encoder.max_length,
            context_len=1,
        )
        return [Request(tuple(before), tuple(after)) for before, after in map(make_disjoint_window, windows)]

    def _generate(self, context: str, arguments: dict[str, object]) -> str:
        arguments = dict(normalize_gen_kwargs(arguments, _MAX_GENERATED))
        stops = handle_stop_sequences(arguments.pop("until", None), self.tokenizer.decode(end_token(self.tokenizer)))
        most_tokens = int(str(arguments.pop("max_gen_toks")))
        # Greedy decoding has no temperature, and transformers warns about one.
        sampling = {k: v for k, v in arguments.items() if arguments.get("do_sample") or k != "temperature"}
        room = self.encoder.max_length - most_tokens
        if room < 1:
            raise UsageError(
                f"max_gen_toks {most_tokens} leaves no room for a prompt: the model sees {self.encoder.max_length} "
                "tokens; give the task fewer in its generation_kwargs"
            )
        ids = self.encoder.encode(context)[-room:]
        continuation = self.model.generate(ids, most_tokens, stops, sampling)
        text = self.tokenizer.decode(continuation, skip_special_tokens=True)
        answer: str = postprocess_generated_text(text, stops, None)
        return answer
