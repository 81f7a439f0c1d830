"""A tokenizer file, trained on a few hundred documents."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from p2pdiloco.tasks.documents import hash64

DOCUMENTS = [f"{hash64(str(index)):x}{hash64(f'-{index}'):x} ümlaut" for index in range(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small tokenizer file, and its digest."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(DOCUMENTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path
