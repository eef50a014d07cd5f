"""What a user writes for each kind of Hugging Face model: the whole of it, as text that tests run.

Names that a user would import are given: ``L``, ``torch``, ``transformers`` and ``lightning_dcp``;
``train_loader`` is an ordinary DataLoader of dicts.
"""

from __future__ import annotations

MODULE = """
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = {model}
    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
"""

FIT = """
L.Trainer(strategy="dcp", devices=4).fit(Model(), train_loader)
"""

_SIZES = (
    "vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=3,"
    " num_attention_heads=4"
)
_GROUPED = f"{_SIZES}, num_key_value_heads=2, pad_token_id=0"
_WINDOW = f"{_GROUPED}, head_dim=4, sliding_window=5"


def _causal(config: str) -> str:
    return f"transformers.AutoModelForCausalLM.from_config(transformers.{config})"


MODELS = {
    "llama": _causal(f"LlamaConfig({_GROUPED})"),
    "qwen2": _causal(f"Qwen2Config({_GROUPED})"),
    "qwen3": _causal(f"Qwen3Config({_GROUPED}, head_dim=4, tie_word_embeddings=True)"),
    "mistral": _causal(f"MistralConfig({_WINDOW})"),
    "gemma2": _causal(f"Gemma2Config({_WINDOW}, attn_logit_softcapping=0.5)"),
    "gemma3": _causal(f"Gemma3TextConfig({_WINDOW})"),
    "gpt2": _causal(
        "GPT2Config(vocab_size=29, n_embd=16, n_layer=3, n_head=4, n_positions=32, bos_token_id=1,"
        " eos_token_id=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)"
    ),
    "bert": (
        f"transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig({_SIZES},"
        " hidden_dropout_prob=0, attention_probs_dropout_prob=0))"
    ),
    "vit": (
        "transformers.AutoModelForImageClassification.from_config(transformers.ViTConfig("
        f"{_SIZES[len('vocab_size=29, ') :]}, image_size=16, patch_size=4, num_labels=5))"
    ),
    "t5": (
        "transformers.AutoModelForSeq2SeqLM.from_config(transformers.T5Config(vocab_size=29,"
        " d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, dropout_rate=0, pad_token_id=0,"
        " decoder_start_token_id=0, relative_attention_num_buckets=8))"
    ),
}


def module_code(kind: str) -> str:
    """The user's LightningModule."""
    return MODULE.format(model=MODELS[kind])
