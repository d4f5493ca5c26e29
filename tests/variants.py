"""Which variants of a test run each time, chosen by measured time; the others are exhaustive.

By file and test without `test_`; of tests that are not here all variants run.
"""

KEPT = {
    "arviz": {
        "the_mean_importance_ratio_is_the_bound": {"weights"},
        "latents_of_rows_are_drawn_anew_in_each_batch_and_others_are_not": {"True"},
        "groups_hold_what_each_draw_implies": {"dense", "tied"},
        "rows_given_as_arguments_are_run_in_batches_with_one_function_for_all": {"whitened"},
    },
    "bayesian": {
        "sampled_hyperparameters_have_the_posterior_that_nuts_finds": {"dense"},
    },
    "benchmarks": {
        "benchmark_runs_in_its_reduced_mode_and_prints_versions_and_device": {
            "startup",
        },
    },
    "conditioning": {
        "conditioning_on_one_half_then_the_other_is_the_posterior_of_all_rows_in_any_order": {"natural"},
        "the_result_is_the_gaussian_that_minimises_the_bound_of_the_new_rows": {"poisson-tied"},
        "what_has_no_gaussian_to_condition_is_refused": {"own base-condition", "several rows-condition"},
        "all_members_of_a_joint_posterior_are_conditioned_together": {"all-tied"},
        "an_outcome_that_nobody_believed_in_is_reached_downhill_and_without_a_warning": {
            "dense-100000.0",
            "tied-30000.0",
        },
        "each_of_several_latents_is_conditioned_on_its_own_outcomes": {"tied", "whitened"},
        "outcomes_that_are_nan_are_not_passed_over": {"tied-condition", "tied-remove"},
        "outcomes_that_are_nan_are_not_passed_over_by_a_joint_posterior": {"condition"},
        "the_order_of_rows_does_not_matter_and_any_of_them_can_leave": {"tied"},
        "past_sites_count_with_the_divergence": {"tied"},
    },
    "coupled_rows": {
        "one_full_step_reaches_the_exact_posterior_of_gaussian_observations": {"averages-tied"},
        "the_loss_is_the_expectation_under_joint_draws": {"softmax-tied"},
        "importance_ratios_are_the_evidence_where_the_posterior_is_exact": {"tied"},
        "predictors_of_few_rows_need_no_matrix_of_all_rows": {"differences-True"},
    },
    "decoupled": {
        "the_process_and_its_draws_have_the_posterior_at_any_inputs": {"full-root"},
        "a_full_natural_step_leads_to_the_targets_at_the_dense_gradients_with_the_block_s_own_mean": {"solve"},
        "losses_and_updates_on_minibatches_average_to_those_on_all_rows": {"orthogonal-True"},
        "the_gradient_of_hyperparameters_is_that_of_the_dense_bound": {"full-root", "solve-natural"},
        "a_batch_of_kernels_gives_each_latent_s_posterior": {"full-root"},
        "training_reaches_the_collapsed_decoupled_bound": {"full"},
        "two_sites_a_plate_and_sampled_hyperparameters_train_and_predict": {"orthogonal-2"},
    },
    "deep_kernels": {
        "a_network_in_a_kernel_is_trained_on_small_batches_and_predicts": {"nnx"},
    },
    "derivatives": {
        "values_and_derivatives_of_first_and_second_order_are_those_of_the_dense_formulas": {"dense", "natural"},
        "any_subset_of_the_arguments_can_be_differentiated": {"natural"},
        "gradients_of_a_batch_are_those_of_its_members": {"natural-all"},
        "gradients_in_float32_are_those_of_float64_to_its_rounding": {"anchored", "natural", "weights"},
    },
    "devices": {
        "between_devices_only_sums_over_rows_travel": {"joint"},
        "updates_on_eight_devices_are_those_on_one": {"tied"},
        "fit_on_eight_devices_is_that_on_one": {"natural"},
    },
    "equivalence": {
        "a_long_run_traces_the_model_no_more_often_than_a_short_one": {"whitened"},
        "losses_and_updates_on_minibatches_average_to_those_on_all_rows": {"tied-disjoint", "whitened-subsets"},
    },
    "float32": {
        "data_that_swallow_the_prior_are_refused": {"dense"},
        "a_full_natural_step_in_float32_is_the_dense_optimum_and_stays_there": {
            "tied-lengthscale_0.001-variance_1e+06",
            "tied-lengthscale_1-variance_1",
        },
        "the_dense_posterior_keeps_its_mean_at_small_noise": {"0.01"},
        "a_full_natural_step_on_a_signal_too_strong_for_float32_is_right_or_refused_and_counted": {"tied"},
        "an_arbitrary_whitened_posterior_in_float32_is_right_and_so_are_those_that_gradients_lead_to": {
            "lengthscale_0.001-variance_1e+06",
            "lengthscale_1-variance_1",
        },
    },
    "functionals": {
        "covariances_of_derivatives_are_the_closed_forms": {"Matérn 3/2"},
        "every_posterior_takes_functionals": {"dense", "tied"},
        "integrals_in_closed_form_are_those_by_many_nodes": {"0.0001"},
        "covariances_of_derivatives_are_finite_differences": {"rational quadratic"},
    },
    "functions": {
        "function_draws_have_the_mean_and_covariance_of_the_posterior": {"dense"},
        "draws_of_the_prior_have_the_kernel_as_covariance_with_any_number_of_features": {
            "Linear",
            "SquaredExponential",
            "product of sums",
        },
        "the_process_has_the_guides_posterior_at_any_inputs": {"tied"},
    },
    "growing": {
        "unused_room_changes_nothing_and_neither_does_an_inducing_input_when_it_is_added": {"whitened"},
        "a_process_knows_what_is_there": {"hybrid"},
    },
    "inducing": {
        "trained_inducing_inputs_stay_in_their_box": {"tied"},
    },
    "inducing_grid": {
        "marginals_covariance_draws_and_divergence_are_those_of_dense_algebra": {"three axes"},
    },
    "joint": {
        "one_full_step_reaches_the_exact_joint_posterior_and_its_bound_is_the_evidence": {"tied"},
        "members_are_what_meets_in_a_term": {"with_kernel_latents-expected2"},
        "missing_outcomes_are_left_out_of_the_bound_and_drawn_at_prediction": {"count-auto"},
        "correlated_coefficients_have_the_exact_posterior_given_their_scales": {"rows", "scaled and turned"},
        "coefficients_have_the_exact_posterior_given_scales_of_several_shapes": {"auto"},
    },
    "joint_cavities": {
        "sums_of_gps_and_effects_have_the_densities_of_dense_algebra": {"eliminated"},
    },
    "judgement": {
        "intervals_cover_what_was_simulated": {"normal"},
        "vsbc_sees_a_shift_and_its_probabilities_a_wrong_width_in_gps_and_other_latents": {"shifted"},
        "cavities_of_a_gaussian_likelihood_are_exact_leave_one_out": {"weights"},
        "cavities_of_counts_are_close_to_fitting_without_each_datum": {"dense"},
    },
    "many_effects": {
        "one_full_step_reaches_the_exact_posterior_of_all_effects": {"tied"},
    },
    "marginal_losses": {
        "batches_of_one_row_are_taken": {"natural"},
        "on_all_data_each_loss_leads_to_the_maximum_of_the_evidence": {"averaged"},
        "values_and_gradients_of_batches_average_to_those_of_all_data_but_for_the_batch_evidence": {"batch", "bound"},
    },
    "markov": {
        "smoothing_is_the_dense_posterior": {"Matérn 3/2-False", "Matérn 3/2-True"},
        "states_have_the_covariance_of_the_kernel_and_noise_fills_what_is_forgotten": {"Matérn 1/2", "Matérn 3/2"},
        "training_and_predictions_are_those_of_the_dense_posterior": {"Poisson"},
        "gradients_hold_where_one_form_of_the_noise_follows_the_other_and_where_times_are_equal": {"Matern32"},
    },
    "markov_inducing": {
        "a_value_between_two_inducing_times_is_known_from_their_states_alone": {"Matérn 3/2", "sum"},
        "smoothing_of_pairs_is_the_dense_posterior_of_all_states": {"Matérn 3/2", "sum"},
        "one_step_is_the_best_posterior_of_the_states_for_gaussian_noise": {"with effects"},
        "steps_on_minibatches_average_to_the_step_on_all_rows": {"with effects"},
        "with_all_times_it_is_the_posterior_with_a_site_in_each_row": {"with effects"},
        "importance_ratios_are_constant_where_the_posterior_is_exact": {"f alone"},
    },
    "markov_joint": {
        "bound_and_its_gradient_are_those_of_one_kernel_with_the_effects": {"dense"},
        "predictions_are_those_of_one_kernel_with_the_effects": {"dense"},
        "one_step_is_the_exact_posterior_for_gaussian_noise": {"dense"},
    },
    "models": {
        "a_healthy_run_refuses_nothing_and_lowers_the_loss": {"tied-Poisson"},
        "independent_latents_under_a_plate_give_the_sum_of_single_latent_bounds": {"dense", "tied"},
        "training_on_minibatches_comes_close_to_the_optimum": {"external"},
        "mutable_state_survives_a_run": {"three particles", "two sites"},
        "scaling_the_likelihood_is_replicating_the_data": {"tied"},
        "two_sites_with_their_own_outputs_give_the_sum_of_two_bounds": {"tied", "whitened"},
        "a_batch_of_kernels_gives_the_sum_of_the_bounds_of_each_kernel": {"tied"},
    },
    "multiscale": {
        "every_guide_with_inducing_variables_takes_them": {"decoupled", "tied"},
    },
    "natural_gradient": {
        "natural_gradients_do_not_warn": {"options2"},
        "natural_parameters_under_a_plain_optimizer_warn_once_and_only_they": {"tied", "whitened"},
        "the_fixed_point_is_the_optimum_of_the_dense_bound_and_below_the_evidence": {"natural-poisson"},
        "the_fixed_point_of_two_latents_for_each_datum_is_the_optimum_of_the_dense_bound": {"dense"},
        "a_batch_with_nan_is_refused_and_later_steps_go_on": {"tied"},
        "without_a_floor_the_fixed_point_is_the_optimum_for_outliers_too": {"tied"},
        "a_step_moves_to_the_targets_of_floored_precisions": {"natural-0.3", "tied-0.3"},
    },
    "optimizers": {
        "a_fresh_state_can_be_donated": {"growing"},
        "a_gradient_whose_square_overflows_is_refused_and_training_goes_on": {"natural"},
        "steps_are_those_of_the_loss_without_its_scale": {"tied"},
    },
    "prediction": {
        "predictive_draws_at_new_inputs_have_the_moments_of_the_posterior": {"mean_field", "tied", "weights"},
        "median_and_quantiles_are_the_closed_form": {"decoupled", "tied", "weights"},
        "the_posterior_at_some_inputs_is_a_block_of_that_at_more": {"decoupled", "tied"},
        "a_guide_built_in_a_new_process_predicts_the_same_from_params_alone": {"AutoNormal continuous"},
    },
    "qsgp": {
        "with_a_gaussian_likelihood_losses_and_gradients_average_to_those_of_the_dense_bound": {
            "inducing of fixed numbers-chevron"
        },
        "with_another_likelihood_the_loss_bounds_the_dense_one_and_equals_it_with_all_functions": {
            "covariance of inducing variables-logistic"
        },
    },
    "regression": {
        "the_optimal_posterior_is_one_natural_step_of_every_guide": {"natural", "tied"},
    },
    "reparam": {
        "nuts_with_inducing_inputs_at_the_data_is_nuts_on_the_exact_latent_model": {"mean"},
    },
    "starts": {
        "what_was_observed_is_found_in_many_forms_and_the_rest_starts_near_the_median": {
            "a logarithm",
            "a multivariate normal",
            "an index",
            "two sites",
        },
        "latents_start_about_the_prior_median_within_a_third_of_a_standard_deviation": {"half Cauchy", "normal"},
    },
    "streaming": {
        "with_gaussian_noise_the_stream_ends_at_the_posterior_of_all_rows": {"5"},
    },
    "stress": {
        "hostile_problems_end_finite_and_right_or_steps_are_refused_and_counted": {"tied-float32"},
    },
    "tight_bound": {
        "a_joint_posterior_reaches_the_tighter_bound_of_all_its_members": {"tied"},
        "the_gain_is_that_of_dense_algebra_whatever_the_posterior": {
            "a subsample-whitened",
            "log-normal-whitened",
            "masked-tied",
            "masked-whitened",
            "mixed-whitened",
            "plain-whitened",
            "scaled and shifted-whitened",
            "the same rows-whitened",
            "two sites-whitened",
            "two terms-whitened",
        },
    },
    "weight_space": {
        "the_loss_and_its_gradients_are_those_of_minus_the_dense_bound": {"fourier-natural", "map-root"},
        "the_posterior_the_process_and_drawn_functions_agree_at_new_inputs_after_pickling_too": {"hilbert-mean"},
        "training_on_all_data_reaches_the_maximum_of_the_evidence": {"natural"},
        "a_row_whose_features_all_vanish_has_a_gradient_and_its_step_is_taken": {"natural"},
        "a_plate_of_latents_has_weights_for_each": {"2"},
    },
}
