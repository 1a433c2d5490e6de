"""A system of one's own around GPT-2, as astra-rl's examples write it: log-probs over context and continuation."""

import torch
from astra_rl import ASTSystem, DetoxifyScorer
from transformers import AutoTokenizer, GPT2LMHeadModel

MODEL_NAME = "gpt2"
LENGTH = 4


class GPT2System(ASTSystem):
    def __init__(self, device="cuda"):
        super().__init__(DetoxifyScorer())
        self.device = device
        self.tester = GPT2LMHeadModel.from_pretrained(MODEL_NAME).to(device)
        self.target = GPT2LMHeadModel.from_pretrained(MODEL_NAME).to(device)
        self.prepare_tokenizer()

    def prepare_tokenizer(self):
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL_NAME)
        self.tokenizer.pad_token_id = self.tokenizer.eos_token_id
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "left"
        self.max_ctx = self.tester.config.n_positions

    def get_target_logprobs(self, context, continuation):
        return self.__score(self.target, context, continuation)

    def get_baseline_logprobs(self, context, continuation):
        return self.get_target_logprobs(context, continuation)

    def get_tester_logprobs(self, context, continuation):
        return self.__score(self.tester, context, continuation)

    def rollout_prompt_with_tester(self, prompt):
        return self.__generate(self.tester, prompt)

    def rollout_prompt_with_target(self, prompt):
        return self.__generate(self.target, prompt)

    def parameters(self):
        return self.tester.parameters()

    def __generate(self, model, prompt):
        encoded = self.tokenizer(
            prompt, padding=True, return_tensors="pt", truncation=True, max_length=self.max_ctx - LENGTH
        ).to(self.device)
        output = model.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            pad_token_id=self.tokenizer.eos_token_id,
            max_new_tokens=LENGTH,
            do_sample=True,
            top_k=50,
        )
        return self.tokenizer.batch_decode(output[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)

    def __score(self, model, context, continuation):
        before, after = (self.tokenizer(texts).input_ids for texts in (context, continuation))
        width = max(len(a) + len(b) for a, b in zip(before, after))  # noqa: B905
        ids, is_scored = [], []
        for a, b in zip(before, after):  # noqa: B905
            padding = width - len(a) - len(b)
            ids.append(a + b + [self.tokenizer.eos_token_id] * padding)
            is_scored.append([False] * len(a) + [True] * len(b) + [False] * padding)
        ids = torch.tensor(ids).to(self.device)[:, -self.max_ctx :]
        is_scored = torch.tensor(is_scored).to(self.device)[:, -self.max_ctx :]
        logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)
        logprobs = logprobs.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return logprobs.masked_fill(~is_scored[:, 1:], 0.0)
