"""The model with which lm-eval's tasks score with diffquant. Import it only if lm-eval is installed."""

from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffquant.checkpoints.tokens import end_token
from diffquant.errors import UsageError
from diffquant.measure.language_model import LanguageModel, Request, RequestEncoder
from diffquant.measure.scoring import score
from diffquant.support.progress import Progress

_MAX_GENERATED = 256


class HarnessModel(LM):
    """An lm-eval model whose scores equal those of lm-eval's HFLM.

    Args:
        model: model that computes the scores.
        batch_tokens: largest number of tokens per scoring pass.
    """

    def __init__(self, model: LanguageModel, batch_tokens: int, progress: Progress) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.batch_tokens = batch_tokens
        self.progress = progress
        self.encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary_size)
        self._device = model.device

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-probability and whether greedy decoding would produce it."""
        encoded = self.encoder.encode_requests(request.args for request in requests)
        answers = score(self.model, encoded, self.batch_tokens, self.progress)
        self._store("loglikelihood", requests, answers)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-probability of each text; a request's arguments are the tuple (text,).

        Every token is predicted once, from as much context as fits.
        """
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(score(self.model, [w for of_text in windows for w in of_text], self.batch_tokens, self.progress))
        totals = [sum(next(scores)[0] for _ in of_text) for of_text in windows]
        self._store("loglikelihood_rolling", requests, totals)
        return totals

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Generate a continuation for each (context, generation arguments), cut at the first stop sequence."""
        answers = []
        for done, request in enumerate(requests, 1):
            context, arguments = request.args
            answers.append(self._generate(context, dict(arguments)))
            self._store("generate_until", [request], answers[-1:])
            self.progress(done, len(requests), "generating")
        return answers

    def _store(self, kind: str, requests: Sequence[Instance], answers: Sequence[object]) -> None:
        """Put answers into lm-eval's cache."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)

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
                f"max_gen_toks {most_tokens} leaves no tokens for a prompt: the model's context has "
                f"{self.encoder.max_length}; set fewer in the task's generation_kwargs"
            )
        ids = self.encoder.encode(context)[-room:]
        continuation = self.model.generate(ids, most_tokens, stops, sampling)
        text = self.tokenizer.decode(continuation, skip_special_tokens=True)
        answer: str = postprocess_generated_text(text, stops, None)
        return answer
