"""The file that tells every process of a run what the records of its model look like."""

from pathlib import Path

import pytest

from megatron_rl.records import ModelContract, ModelContractError, read_model_contract, write_model_contract

MOE = ModelContract(vocab_size=248320, moe_layers=(1, 3), num_experts=8, experts_per_token=3)


@pytest.mark.parametrize("contract", [MOE, ModelContract(50, (), 0, 0)])
def test_reading_gives_back_what_was_written(tmp_path: Path, contract: ModelContract) -> None:
    write_model_contract(tmp_path / "contract.json", contract)
    assert read_model_contract(tmp_path / "contract.json") == contract
    assert contract.num_moe_layers == len(contract.moe_layers)


def test_padding_rows_are_no_tokens() -> None:
    assert MOE.limited_to(248077).vocab_size == 248077
    assert MOE.limited_to(250000) == MOE


@pytest.mark.parametrize("content", [None, "", "[]", '{"vocab_size": 50}', '{"vocab_size": 50, "moe_layers": [], "experts": 1}'])
def test_a_file_that_is_no_contract_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "model_contract.json").write_text(content)
    with pytest.raises(ModelContractError, match=r"model_contract.json: cannot be read .*; start the run again"):
        read_model_contract(tmp_path / "model_contract.json")
