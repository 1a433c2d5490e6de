"""Expert iteration on code validation: a grid in the script, in the style of neural-interactive-proofs.

tests/nip/test_nip_scripts.py runs it with its imports and addresses replaced.
"""

import logging
from argparse import Namespace

from nip import (
    AgentsParameters,
    CodeValidationAgentParameters,
    CommonProtocolParameters,
    DebateProtocolParameters,
    HyperParameters,
    NipProtocolParameters,
    PreparedExperimentInfo,
    PureTextEiParameters,
    RlTrainerParameters,
    TextRlParameters,
    prepare_experiment,
    run_experiment,
)
from nip.utils.experiments import ExperimentFunctionArguments, SequentialHyperparameterExperiment

logger = logging.getLogger(__name__)

PARAM_GRID = {
    "interaction_protocol": ["nip", "debate"],
    "dataset_name": ["lrhammond/buggy-apps"],
    "num_iterations": [1],
    "rounds_per_batch": [40 * 2],
    "verifier_model": ["gpt-4o-mini-2024-07-18"],
    "prover_model": ["gpt-4o-2024-08-06"],
    "freeze_verifier": [True],
    "shared_reward": [False],
    "min_message_rounds": [1],
    "max_message_rounds": [2],
    "verifier_first": [False],
    "debate_prover0_first": [True],
    "rollout_selection_method": ["threshold"],
}


def build_hyper_params(combo: dict, cmd_args: Namespace) -> HyperParameters:
    agents = AgentsParameters(
        verifier=CodeValidationAgentParameters(
            model_name=combo["verifier_model"],
            freeze_agent=combo["freeze_verifier"],
            temperature=None,
            top_p=None,
            use_dummy_api=False,
        )
    )
    names = ["prover"] if combo["interaction_protocol"] == "nip" else ["prover0", "prover1"]
    for name in names:
        agents[name] = CodeValidationAgentParameters(
            model_name=combo["prover_model"],
            shared_model_group="provers_group",
            fine_tune_from_scratch=False,
            use_dummy_api=False,
        )
    rounds = {
        "min_message_rounds": combo["min_message_rounds"],
        "max_message_rounds": combo["max_message_rounds"],
    }
    return HyperParameters(
        scenario="code_validation",
        trainer="pure_text_ei",
        dataset=combo["dataset_name"],
        interaction_protocol=combo["interaction_protocol"],
        rl=RlTrainerParameters(
            frames_per_batch=combo["rounds_per_batch"],
            rollouts_per_iteration=None,
            num_iterations=combo["num_iterations"],
            num_test_iterations=1,
        ),
        text_rl=TextRlParameters(test_scheme="none"),
        pure_text_ei=PureTextEiParameters(rollout_selection_method=combo["rollout_selection_method"]),
        agents=agents,
        protocol_common=CommonProtocolParameters(
            shared_reward=combo["shared_reward"], verifier_first=combo["verifier_first"]
        ),
        nip_protocol=NipProtocolParameters(**rounds),
        debate_protocol=DebateProtocolParameters(**rounds, prover0_first=combo["debate_prover0_first"]),
    )


def experiment_fn(arguments: ExperimentFunctionArguments):
    cmd_args = arguments.cmd_args
    logger.setLevel(arguments.log_level)
    logger.info("Run %s: %s", arguments.run_id, arguments.combo)
    run_experiment(
        build_hyper_params(arguments.combo, cmd_args),
        logger=logger,
        tqdm_func=arguments.tqdm_func,
        ignore_cache=cmd_args.ignore_cache,
        use_wandb=cmd_args.use_wandb,
        wandb_project=cmd_args.wandb_project,
        wandb_entity=cmd_args.wandb_entity,
        run_id=arguments.run_id,
        allow_resuming_wandb_run=True,
        allow_overriding_wandb_config=True,
        wandb_tags=[cmd_args.tag] if cmd_args.tag else [],
        wandb_group=arguments.common_run_name,
        num_rollout_workers=cmd_args.num_rollout_workers,
    )


def run_id_fn(combo_index: int | None, cmd_args: Namespace) -> str:
    return f"ei_{cmd_args.run_infix}" + ("" if combo_index is None else f"_{combo_index}")


def run_preparer_fn(combo: dict, cmd_args: Namespace) -> PreparedExperimentInfo:
    return prepare_experiment(build_hyper_params(combo, cmd_args), ignore_cache=cmd_args.ignore_cache)


if __name__ == "__main__":
    experiment = SequentialHyperparameterExperiment(
        param_grid=PARAM_GRID,
        experiment_fn=experiment_fn,
        run_id_fn=run_id_fn,
        run_preparer_fn=run_preparer_fn,
        experiment_name="EI",
        allow_resuming_wandb_run=True,
    )
    experiment.parser.add_argument("--num-rollout-workers", type=int, default=4, help="Workers that sample rollouts")
    experiment.run()
