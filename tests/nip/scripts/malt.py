"""MALT on code validation: the parameters are in a file, in the style of neural-interactive-proofs.

tests/nip/test_nip_scripts.py runs it with its imports and addresses replaced.
"""

from argparse import Namespace
from pathlib import Path

from nip import (
    AgentsParameters,
    BaseRunParameters,
    CodeValidationAgentParameters,
    CodeValidationParameters,
    CommonProtocolParameters,
    DatasetParameters,
    DebateProtocolParameters,
    HyperParameters,
    NipProtocolParameters,
    PureTextEiParameters,
    PureTextMaltParameters,
    RlTrainerParameters,
    TextRlParameters,
    prepare_experiment,
    run_experiment,
)
from nip.utils.env import get_env_var
from nip.utils.experiments import ExperimentFunctionArguments, SequentialHyperparameterExperiment


def build_hyper_params(combo: dict, cmd_args: Namespace) -> HyperParameters:
    verifier_provider, _, verifier_model = combo["verifier_model"].partition("/")
    prover_provider, _, prover_model = combo["prover_model"].partition("/")
    agents = {
        "verifier": CodeValidationAgentParameters(
            model_provider=verifier_provider,
            model_name=verifier_model,
            system_prompt_template_path=combo["verifier_system_prompt_template"],
            temperature=combo["verifier_temperature"],
            top_p=combo["verifier_top_p"],
            repetition_penalty=combo["verifier_repetition_penalty"],
            freeze_agent=combo["freeze_verifier"],
            use_supervisor_message=combo["verifier_supervisor_message"],
            use_dummy_api=cmd_args.use_dummy_api,
            dpo_beta=combo["dpo_beta"],
        ),
        "prover": CodeValidationAgentParameters(
            model_provider=prover_provider,
            model_name=prover_model,
            temperature=combo["prover_temperature"],
            freeze_agent=combo["freeze_prover"],
            use_dummy_api=cmd_args.use_dummy_api,
            fine_tune_from_scratch=combo["fine_tune_from_scratch"],
            dpo_beta=combo["dpo_beta"],
            max_response_words=combo["prover_max_words"],
            use_supervisor_message=combo["prover_supervisor_message"],
        ),
    }
    return HyperParameters(
        scenario="code_validation",
        trainer=combo["trainer"],
        dataset=combo["dataset_name"],
        test_dataset_split=combo["test_dataset_split"],
        rl=RlTrainerParameters(
            rollouts_per_iteration=combo["rollouts_per_iteration"],
            frames_per_batch=None,
            num_iterations=combo["num_iterations"],
            num_test_iterations=combo["num_test_iterations"],
        ),
        text_rl=TextRlParameters(
            test_scheme=combo["test_scheme"],
            fine_tune_on_all_previous_rollouts=combo["fine_tune_on_all_previous_rollouts"],
            verifier_guess_replacement_proportion=combo["verifier_guess_replacement_proportion"],
            verifier_guess_replacement_annealing=combo["verifier_guess_replacement_annealing"],
            verifier_guess_replacement_annealing_rate=combo["verifier_guess_replacement_annealing_rate"],
        ),
        pure_text_ei=PureTextEiParameters(rollout_selection_method=combo["rollout_selection_method"]),
        pure_text_malt=PureTextMaltParameters(
            num_initial_ei_iterations=combo["malt_num_initial_ei_iterations"],
            pair_selection_method=combo["malt_pair_selection_method"],
        ),
        agents=AgentsParameters(**agents),
        interaction_protocol=combo["interaction_protocol"],
        protocol_common=CommonProtocolParameters(
            shared_reward=combo["shared_reward"],
            verifier_first=combo["verifier_first"],
            randomize_prover_stance=combo["randomize_prover_stance"],
            verifier_decision_scale=combo["verifier_decision_scale"],
            prover_invalid_response_penalty=None,
        ),
        nip_protocol=NipProtocolParameters(max_message_rounds=combo["max_message_rounds"]),
        debate_protocol=DebateProtocolParameters(max_message_rounds=combo["max_message_rounds"]),
        code_validation=CodeValidationParameters(apps_difficulty=combo["apps_difficulty"]),
        dataset_options=DatasetParameters(max_test_size=combo["max_test_size"]),
        base_run=BaseRunParameters(base_run_type="none"),
        seed=combo["seed"],
    )


def experiment_fn(arguments: ExperimentFunctionArguments):
    cmd_args = arguments.cmd_args
    run_experiment(
        build_hyper_params(arguments.combo, cmd_args),
        tqdm_func=arguments.tqdm_func,
        use_wandb=cmd_args.use_wandb,
        run_id=arguments.run_id,
        wandb_group=arguments.common_run_name,
        force_more_iterations=arguments.combo["force_more_iterations"],
    )


def run_id_fn(combo_index: int | None, cmd_args: Namespace) -> str:
    return f"cv_{cmd_args.run_infix}" if combo_index is None else f"cv_{cmd_args.run_infix}_{combo_index}"


experiment = SequentialHyperparameterExperiment(
    experiment_fn=experiment_fn,
    run_id_fn=run_id_fn,
    run_preparer_fn=lambda combo, cmd_args: prepare_experiment(hyper_params=build_hyper_params(combo, cmd_args)),
    experiment_name="CV",
    arg_parser_description="Code validation from a file of parameters",
    default_config_filename="single_experiment.json5",
    config_file_base_path=Path(__file__).parent,
    default_wandb_project=get_env_var("WANDB_CV_PROJECT", ""),
    allow_resuming_wandb_run=True,
    add_run_infix_argument=False,
)
experiment.parser.add_argument("run_infix", type=str, nargs="?", default="", help="Part of the run's name")
experiment.parser.add_argument("--dummy", action="store_true", dest="use_dummy_api", help="Use the dummy API")

if __name__ == "__main__":
    experiment.run()
