"""Contrastive training of embeddings with every verb by itself, evaluation on rows that are held out, and a search at the end.

It gives the very weights of embedding_basic.py. Stop it whenever you like, and go on with --resume FOLDER, and that folder as
--model: it holds the whole model.

python cookbook/embedding_loop.py [--model ms://… | hf://… | FOLDER] [--pooling …] [--output FOLDER] [--resume FOLDER]
"""

import argparse
from pathlib import Path

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import TripletProcessor
from twinkle.template import ChatTemplate

DATA = str(Path(__file__).parents[1] / "twinkle_core/data/bundled/exclusions.jsonl")
EPOCHS = 3


def load(template: ChatTemplate, rows: range) -> Dataset:
    """Groups of rows of token ids: labels are 1 for an anchor, 0 for its positive and its negatives."""
    dataset = Dataset(DatasetMeta(DATA, data_slice=rows))
    dataset.map(TripletProcessor(query_prefix="", document_prefix=""))  # "query: " and "passage: " for E5
    dataset.set_template(template)
    dataset.encode()
    return dataset


def evaluate(model: TransformersModel, dataloader: DataLoader) -> dict[str, float]:
    """recall@1 among all documents, and the mean similarities."""
    for batch in dataloader:
        model.forward_only(inputs=batch)
    return model.calculate_metric(is_training=False)


def search(model: TransformersModel, template: ChatTemplate, query: str, documents: list[str]) -> str:
    """The document that is most similar to a query."""
    rows = [template.encode_text(text) for text in (query, *documents)]
    vectors = model.forward_only(inputs=rows, task="embedding").embeddings  # [B, D], of length 1
    return documents[int((vectors[1:] @ vectors[0]).argmax())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf://sentence-transformers/all-MiniLM-L6-v2", help="ms://…, hf://… or a folder")
    parser.add_argument("--pooling", default="mean", choices=("mean", "cls", "last_token"))
    parser.add_argument("--output", default="output/embedding_loop")
    parser.add_argument("--resume", metavar="FOLDER")
    args = parser.parse_args()

    twinkle.initialize(seed=42)
    template = ChatTemplate(args.model, use_chat_template=False, max_length=64, truncation_strategy="right")
    dataloader = DataLoader(load(template, range(100)), batch_size=8, shuffle=True, seed=42)
    held_out = DataLoader(load(template, range(100, 130)), batch_size=30)

    model = TransformersModel("AutoModel", model_id=args.model, mixed_precision="no")
    model.apply_patch("embedding", pooling=args.pooling, normalize=True)
    model.set_template(template)  # its tokenizer is saved with the model
    model.set_loss("infonce", temperature=0.05)
    model.set_optimizer("adamw", lr=1e-4)
    model.add_metric("loss")
    model.add_metric("embedding")
    print(model.get_train_configs())

    if args.resume:
        state = model.resume_from_checkpoint(args.resume)
        dataloader.resume_from_checkpoint(state["consumed_train_samples"])

    print("before:", evaluate(model, held_out))
    while dataloader.epoch < EPOCHS:
        for batch in dataloader:
            model.forward(inputs=batch)
            model.calculate_loss()
            model.backward()
            model.clip_grad_norm(1.0)
            model.step()
            model.zero_grad()
            model.lr_step()
        numbers = model.calculate_metric(is_training=True)
        print(f"epoch {dataloader.epoch}  loss {numbers['loss']:.4f}  recall@1 {numbers['recall_at_1']:.2f}")
        print("evaluation:", evaluate(model, held_out))
        samples = dataloader.get_state()["consumed_train_samples"]
        name = f"epoch-{dataloader.epoch}"
        print("saved", model.save(name, args.output, save_optimizer=True, consumed_train_samples=samples))

    print("saved", model.save("last", args.output))
    documents = ["The cellist tuned her strings before the concert.", "Rye loaves cool on a rack by the oven."]
    print("found:", search(model, template, "music, not baking", documents))


if __name__ == "__main__":
    main()
