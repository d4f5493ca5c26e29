"""Which variants of a test run each time, chosen by measured time; the others are exhaustive.

By file and test without `test_`; of tests that are not here all variants run.
"""

KEPT = {
    "arviz": {
        "the_mean_importance_ratio_is_the_bound": {"tied", "weights", "mean_field"},
        "draws_of_sampled_basis_functions_have_the_covariance_of_the_posterior": {"chevron"},
    },
    "conditioning": {
        "conditioning_on_one_half_then_the_other_is_the_posterior_of_all_rows_in_any_order": {"tied", "natural"},
        "the_result_is_the_gaussian_that_minimises_the_bound_of_the_new_rows": {"poisson-tied"},
    },
    "coupled_rows": {
        "one_full_step_reaches_the_exact_posterior_of_gaussian_observations": {
            "averages-tied",
            "correlated-tied",
            "averages-not joint",
        },
        "the_loss_is_the_expectation_under_joint_draws": {"softmax-tied", "preferences-tied"},
        "draws_of_another_loss_are_joint_over_the_rows": {"whitened"},
        "importance_ratios_are_the_evidence_where_the_posterior_is_exact": {"tied"},
    },
    "decoupled": {
        "the_process_and_its_draws_have_the_posterior_at_any_inputs": {"solve-natural", "full-root"},
        "a_full_natural_step_leads_to_the_targets_at_the_dense_gradients_with_the_block_s_own_mean": {"solve"},
        "losses_and_updates_on_minibatches_average_to_those_on_all_rows": {"orthogonal-True"},
    },
    "derivatives": {
        "values_and_derivatives_of_first_and_second_order_are_those_of_the_dense_formulas": {
            "natural",
            "anchored",
            "projection",
            "dense",
        },
    },
    "equivalence": {
        "a_long_run_traces_the_model_no_more_often_than_a_short_one": {"whitened"},
        "losses_and_updates_on_minibatches_average_to_those_on_all_rows": {"tied-disjoint", "whitened-subsets"},
    },
    "fit_model": {
        "the_best_sites_of_a_joint_posterior_are_found_from_those_of_far_other_hyperparameters": {"time"},
    },
    "float32": {
        "data_that_swallow_the_prior_are_refused": {"tied", "dense"},
        "weights_that_the_data_settle_beyond_float32_are_trained_and_the_prior_of_the_others_stays": {"natural-1"},
    },
    "functions": {
        "function_draws_have_the_mean_and_covariance_of_the_posterior": {"tied", "dense", "weights"},
        "draws_of_the_prior_have_the_kernel_as_covariance_with_any_number_of_features": {
            "product of sums",
            "SquaredExponential",
            "Linear",
        },
        "the_process_has_the_guides_posterior_at_any_inputs": {"whitened", "tied", "weights"},
    },
    "growing": {
        "unused_room_changes_nothing_and_neither_does_an_inducing_input_when_it_is_added": {"whitened"},
        "a_process_knows_what_is_there": {"hybrid"},
    },
    "inducing": {"trained_inducing_inputs_stay_in_their_box": {"tied"}},
    "joint": {
        "one_full_step_reaches_the_exact_joint_posterior_and_its_bound_is_the_evidence": {"tied"},
        "members_are_what_meets_in_a_term": {"everything-expected1", "with_kernel_latents-expected2"},
        "a_scale_that_terms_know_otherwise_stays_a_member": {"elsewhere"},
    },
    "judgement": {
        "vsbc_sees_a_shift_and_its_probabilities_a_wrong_width_in_gps_and_other_latents": {"shifted"},
        "each_latent_of_a_datum_has_its_own_cavity": {"draws-0.6"},
        "cavities_of_a_gaussian_likelihood_are_exact_leave_one_out": {"tied", "weights"},
        "cavities_of_counts_are_close_to_fitting_without_each_datum": {"dense"},
    },
    "marginal_losses": {
        "rows_in_single_precision_go_with_parameters_in_double_precision": {"natural"},
        "a_scale_of_the_whole_model_scales_the_loss": {"averaged"},
        "batches_of_one_row_are_taken": {"natural"},
        "on_all_data_each_loss_leads_to_the_maximum_of_the_evidence": {"averaged", "adversarial"},
    },
    "markov": {
        "smoothing_is_the_dense_posterior": {
            "quasi-periodic and rough-False",
            "product-True",
            "Matérn 3/2-False",
            "Matérn 3/2-True",
            "cosine-False",
        },
        "new_times_may_have_another_dtype": {"float32"},
        "states_have_the_covariance_of_the_kernel_and_noise_fills_what_is_forgotten": {
            "Matérn 1/2",
            "Matérn 3/2",
            "Matérn 5/2",
            "quasi-periodic and rough",
        },
    },
    "models": {
        "a_healthy_run_refuses_nothing_and_lowers_the_loss": {"natural-Bernoulli", "tied-Poisson"},
        "independent_latents_under_a_plate_give_the_sum_of_single_latent_bounds": {"tied", "dense"},
        "training_on_minibatches_comes_close_to_the_optimum": {"external"},
        "mutable_state_survives_a_run": {"two sites", "three particles"},
        "scaling_the_likelihood_is_replicating_the_data": {"tied"},
        "two_sites_with_their_own_outputs_give_the_sum_of_two_bounds": {"tied", "whitened"},
    },
    "multiscale": {"every_guide_with_inducing_variables_takes_them": {"tied", "decoupled"}},
    "natural_gradient": {
        "a_schedule_of_steps_is_the_loop_written_out": {"steps0"},
        "natural_gradients_do_not_warn": {"options2"},
        "natural_parameters_under_a_plain_optimizer_warn_once_and_only_they": {"tied", "whitened"},
        "the_fixed_point_is_the_optimum_of_the_dense_bound_and_below_the_evidence": {"tied-beta", "natural-poisson"},
        "the_fixed_point_of_two_latents_for_each_datum_is_the_optimum_of_the_dense_bound": {"tied", "dense"},
        "a_batch_with_nan_is_refused_and_later_steps_go_on": {"tied"},
        "without_a_floor_the_fixed_point_is_the_optimum_for_outliers_too": {"tied"},
    },
    "optimizers": {
        "a_fresh_state_can_be_donated": {"growing"},
        "a_gradient_whose_square_overflows_is_refused_and_training_goes_on": {"natural", "rows"},
        "steps_are_those_of_the_loss_without_its_scale": {"tied"},
    },
    "prediction": {
        "predictive_draws_at_new_inputs_have_the_moments_of_the_posterior": {"tied", "mean_field", "weights"},
        "median_and_quantiles_are_the_closed_form": {"tied", "decoupled", "weights"},
        "the_posterior_at_some_inputs_is_a_block_of_that_at_more": {"tied", "decoupled"},
    },
    "qsgp": {
        "with_a_gaussian_likelihood_losses_and_gradients_average_to_those_of_the_dense_bound": {
            "inducing-covariance of inducing variables",
            "inducing of fixed numbers-chevron",
            "fourier-with the paper's",
        },
        "with_another_likelihood_the_loss_bounds_the_dense_one_and_equals_it_with_all_functions": {
            "covariance of inducing variables-logistic"
        },
    },
    "regression": {"the_optimal_posterior_is_one_natural_step_of_every_guide": {"tied", "natural"}},
    "starts": {
        "latents_start_about_the_prior_median_within_a_third_of_a_standard_deviation": {
            "normal",
            "beta",
            "half Cauchy",
            "drawn",
            "wide",
        },
    },
    "streaming": {"with_gaussian_noise_the_stream_ends_at_the_posterior_of_all_rows": {"5"}},
    "stress": {"hostile_problems_end_finite_and_right_or_steps_are_refused_and_counted": {"tied-float32"}},
    "tight_bound": {"a_joint_posterior_reaches_the_tighter_bound_of_all_its_members": {"tied"}},
    "weight_space": {
        "the_loss_and_its_gradients_are_those_of_minus_the_dense_bound": {
            "inducing-natural",
            "hilbert-natural",
            "map-root",
            "fourier-natural",
            "inducing-mean, held",
        },
        "the_posterior_the_process_and_drawn_functions_agree_at_new_inputs_after_pickling_too": {
            "inducing-natural",
            "hilbert-mean",
        },
        "training_on_all_data_reaches_the_maximum_of_the_evidence": {"natural"},
        "a_row_whose_features_all_vanish_has_a_gradient_and_its_step_is_taken": {"natural"},
        "a_plate_of_latents_has_weights_for_each": {"2"},
    },
}
